"""How fast and how small, beside other libraries: `make bench`.

One file is one question, with a function `rows(repeats, small)` that gives its rows, or `lines` those of a plot (what
it has is in `__all__`); `python -m performance` asks them one after the other. `turns` and `apart` say how to measure.
"""
