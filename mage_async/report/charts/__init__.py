"""What the report's charts show and where: plain data, which the templates draw as SVG and HTML."""
