"""Pages of runs that are looked at, live or ended: plain data in, HTML out.

Links are relative to the address of a run, which the page's `<base>` names, so that a page knows
neither its server nor its token.
"""
