"""`make docs`: the documentation as a site, built from README.md, CONTRIBUTING.md and docs/ as they are.

The pages stay where they are, and are written for a repository: their links lead to source files, too. The site is made
in three steps. `navigation.py` says which page stands where, `pages.py` turns a page of the repository into one of the
site, and `build.py` runs the generator, strictly, and puts the site in place once `built_pages.py` has found every link
and anchor of it. The rule: nothing is skipped. A link that leads nowhere, a page that no kind of the navigation has, a
picture of a diagram that changed: each ends the build with the file, the line and what would be right.
"""
