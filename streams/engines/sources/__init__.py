"""Where a bridge's list of engines comes from; one module per kind of source.

What lives here: sources, each of which reports the engines that the bridge shall feed, whenever that list changes. What
must not: feeding engines (bridge), and the text form of an address (address).
"""
