"""Soft actor-critic: values over valid actions, a replay buffer of trials, goals relabelled in
hindsight.
"""
