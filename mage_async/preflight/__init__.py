"""What can be known of a pretrained policy before a run's processes start."""
