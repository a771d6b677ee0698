"""Networks that people have trained themselves: from files, to a file, without further code."""
