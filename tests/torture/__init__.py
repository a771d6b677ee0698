"""What is tried thousands of times: damage, kills, floods. `make torture` runs it all, `make test` a small share."""
