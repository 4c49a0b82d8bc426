"""Objects of users' classes, called where they live: what they return becomes plain and checked."""
