"""A benchmark of stock ComfyUI and of this pack, which works as a client of ComfyUI servers.

`python -m parallel_backend.bench` starts the servers. The tab's benchmark is a client of the server that runs already.
"""
