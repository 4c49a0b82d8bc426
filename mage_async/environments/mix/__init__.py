"""Several environments in one run: each group of trials plays one of them."""
