"""The conformance kit: every kernel that a platform registers, held to the contract of its op on a device of that platform.

    pytest --pyargs fitment.conformance --platform NAME [--device ID] [--kernel NAME]… [--evidence FILE]

- *agrees*: each case of the op (:mod:`fitment.ops._cases`) that the kernel's condition admits is computed as near as the op's tolerance
  asks, once with packed and once with strided rows; outputs are NaN before, guards around every buffer stay as they were, inputs too.
- *captured*: a graph replays to the bits of the eager call, also after its buffers' contents have changed.
- *refuses*: what lies outside the condition is refused, with reasons, also when the kernel is asked for by name.
- *reads back*: what ``write_kv`` writes, piece by piece, ``paged_attention`` reads, eager and captured.
- *sources*: the files that date the kernel's evidence are there.
"""
