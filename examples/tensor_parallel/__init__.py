"""A server of two tensor-parallel ranks, with KV heads of their own and with one that both have:
`make demo TP=1`."""
