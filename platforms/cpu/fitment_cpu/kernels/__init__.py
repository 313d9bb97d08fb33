"""The kernels: a module an op; native ones call the extension, ``reference`` adapts core's reference ops to this cache layout."""
