"""The link between core and worker. What its users may rely on, whatever carries it, is in ``link``.

On one host: shared-memory rings, and the socket that hands them over and watches them. From the bottom up: ``layout``
(the memory), ``ring`` (one writer, N readers), ``channel`` (rings on an event loop), ``group`` (rings that several
workers read), ``control`` (messages on the socket), ``connection`` (one live link), ``listener`` and ``connect`` (its
two ends).

Between hosts: one gRPC call. ``credit`` (streams in it), ``remote`` (one live link), ``remote_listener`` and
``connect_remote`` (its two ends).

Frames are opaque bytes here; ``tercet_shared.wire`` gives them meaning.
"""
