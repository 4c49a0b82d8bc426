"""Trials with the policy in the opponent's seat too: an older version of it, or the same one."""
