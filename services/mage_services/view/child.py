"""The start of a process of `mage view`, and its channel to the server that started it."""

from typing import Any

from mage_services.processes.child_process import (
    BlockingChannel,
    ChildProcess,
    die_with_parent,
    inherited_socket,
    module_command,
)


async def start_child(module: str, kind: Any) -> ChildProcess[Any]:
    """Start a module as a process that sends messages of the type `kind`."""
    return await ChildProcess.start(module_command(module), kind)


def channel_to_server(kind: Any) -> BlockingChannel[Any]:
    """Return the channel on which this process receives messages of the type `kind`.

    The process ends with the server from now on.
    """
    die_with_parent()
    end = inherited_socket()
    assert end is not None, "`mage view` starts this process"
    return BlockingChannel(end, kind)
