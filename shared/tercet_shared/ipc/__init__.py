"""The link between processes on one host: shared-memory rings, and the socket that hands them over and watches them.

From the bottom up: ``layout`` (the memory), ``ring`` (one writer, N readers), ``channel`` (rings on an event loop),
``control`` (messages on the socket), ``connection`` (one live link), ``listener`` and ``connect`` (its two ends) and
``link`` (what the users of a link may rely on, whatever carries it). Frames are opaque bytes here;
``tercet_shared.wire`` gives them meaning.
"""
