"""The start of a process of `mage view`, and its channel to the server that started it."""

from typing import Any

from mage_services.processes import child_process


async def start_child(module: str, kind: Any) -> child_process.ChildProcess[Any]:
    """Start a module as a process that sends messages of the type `kind`."""
    return await child_process.ChildProcess.start(child_process.module_command(module), kind)


def channel_to_server(kind: Any) -> child_process.BlockingChannel[Any]:
    """Return the channel on which this process receives messages of the type `kind`.

    The process ends with the server from now on.
    """
    child_process.die_with_parent()
    end = child_process.inherited_socket()
    assert end is not None, "`mage view` starts this process"
    return child_process.BlockingChannel(end, kind)
