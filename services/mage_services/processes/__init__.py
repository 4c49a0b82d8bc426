"""Processes of a run: started, watched, restarted, ended, and where their time goes."""
