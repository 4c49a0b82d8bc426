"""HTML pages about runs, live or ended: plain data in, markup out.

Links are relative to the address that the page's `<base>` names, so a page knows neither its server
nor its token.
"""
