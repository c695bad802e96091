"""The cluster file, placement, and bringing a cluster up and down."""
