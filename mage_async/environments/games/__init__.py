"""Games that are played here, one file each: rules, episode, scripted players, known values."""
