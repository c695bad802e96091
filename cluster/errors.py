"""What can go wrong in this package.

    ClusterError
    ├── ClusterFileError      the cluster file cannot be read or says something impossible
    ├── AlreadyRunningError   a cluster of that name runs on this machine
    ├── NotRunningError       no cluster of that name runs on this machine
    ├── BringUpError          a node did not start, or died before the cluster was complete
    ├── NetworkError          a network of namespaces could not be made or changed
    └── PlacementError        no node can take a worker

A message names the field or node, the value found there, and what to do about it. All arguments reach
`Exception.__init__`, so the errors survive pickling between Ray processes.
"""


class ClusterError(Exception):
    """Base of all errors that this package raises on purpose."""


class ClusterFileError(ClusterError):
    """The cluster file cannot be read, or a value in it is wrong."""


class AlreadyRunningError(ClusterError):
    """A cluster of that name already runs on this machine."""


class NotRunningError(ClusterError):
    """No cluster of that name runs on this machine."""


class BringUpError(ClusterError):
    """A node of a local cluster did not come up before the deadline."""


class NetworkError(ClusterError):
    """A network of namespaces could not be made or changed; the message says which command failed and why."""


class PlacementError(ClusterError):
    """A worker fits on none of the nodes."""
