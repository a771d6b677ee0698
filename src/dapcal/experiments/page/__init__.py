"""Pages, tables and figures of the documentation, made from result files and from nothing else but the paper's numbers.

`results`, `no_harm`, `performance`, `choosing`, `estimators`, `table_flags`, `table_accuracy` and `tables` each write a
page or the tables in one; the others are their parts.
"""
