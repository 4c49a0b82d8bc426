"""SAC-GLAM (arXiv 2410.12481): soft actor-critic with a replay buffer and goals in hindsight."""
