"""The codemods: small parameterised edits of Python source, one module each, with golden files under tests/golden.

Importing this package is cheap; ``registry`` and the codemods themselves import libcst.
"""
