"""Make the HTML of reports, comparisons and `mage view`: plain data in, markup out.

The report, the comparison and the matrix are whole pages in one file each. The pages of `mage view`
are filled in `services/mage_services/view`, from the parts and templates of this package.
"""
