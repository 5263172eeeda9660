"""What `python -m autopar.launch` and the processes that it starts say to one another.

The launcher sets variables of the environment, and makes a folder for each start of the processes. In the folder every
process says how far it has come, and the launcher says which process is lost: sooner than a heartbeat can.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from pathlib import Path

COORDINATOR = "AUTOPAR_COORDINATOR"
NUM_PROCESSES = "AUTOPAR_NUM_PROCESSES"
PROCESS_ID = "AUTOPAR_PROCESS_ID"
LOCAL_DEVICES = "AUTOPAR_LOCAL_DEVICES"
LOCAL_DEVICE_IDS = "AUTOPAR_LOCAL_DEVICE_IDS"
TRANSFER_ADDRESS = "AUTOPAR_TRANSFER_ADDRESS"
RESTART = "AUTOPAR_RESTART"
FOLDER = "AUTOPAR_LAUNCH_FOLDER"
STUCK_AFTER_S = "AUTOPAR_STUCK_AFTER_S"  # read by runtime/heartbeat.py; without a launcher too
VARIABLES = (COORDINATOR, NUM_PROCESSES, PROCESS_ID, LOCAL_DEVICES, LOCAL_DEVICE_IDS, TRANSFER_ADDRESS, RESTART, FOLDER)


class Reached(enum.Enum):
    """How far a process has come."""

    JOINED = "joined"  # `autopar.initialize` has returned
    STEPPED = "stepped"  # a step of all processes has ended
    CHECKPOINT = "checkpoint"  # a checkpoint was saved or restored, by orbax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launched:
    """What the launcher says to one process.

    `coordinator` and `transfer_address` are host:port: of process 0's coordination service, and at which the others
    reach the arrays of this process (CPU devices only). `local_devices` is the number of CPU devices, `device_ids` are
    the GPUs of this process; None where the launcher leaves them to JAX. `restart` counts the starts after the first.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: int | None = None
    device_ids: tuple[int, ...] | None = None
    transfer_address: str | None = None
    restart: int = 0
    folder: Path | None = None

    def variables(self) -> dict[str, str]:
        """The variables of the environment; `read` is the inverse."""
        found = {
            COORDINATOR: self.coordinator,
            NUM_PROCESSES: str(self.num_processes),
            PROCESS_ID: str(self.process_id),
            RESTART: str(self.restart),
        }
        if self.local_devices is not None:
            found[LOCAL_DEVICES] = str(self.local_devices)
        if self.device_ids is not None:
            found[LOCAL_DEVICE_IDS] = ",".join(map(str, self.device_ids))
        if self.transfer_address is not None:
            found[TRANSFER_ADDRESS] = self.transfer_address
        if self.folder is not None:
            found[FOLDER] = str(self.folder)
        return found

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Launched | None:
        """None where no launcher has set the variables. Raises: ValueError, KeyError for variables that are wrong."""
        if COORDINATOR not in environment:
            return None
        devices, ids, folder = (environment.get(name) for name in (LOCAL_DEVICES, LOCAL_DEVICE_IDS, FOLDER))
        return cls(
            coordinator=environment[COORDINATOR],
            num_processes=int(environment[NUM_PROCESSES]),
            process_id=int(environment[PROCESS_ID]),
            local_devices=int(devices) if devices else None,
            device_ids=tuple(map(int, ids.split(","))) if ids else None,
            transfer_address=environment.get(TRANSFER_ADDRESS) or None,
            restart=int(environment.get(RESTART, "0")),
            folder=Path(folder) if folder else None,
        )


# In the folder


def say_reached(reached: Reached) -> None:
    """Says how far this process has come, to the launcher where there is one."""
    folder, process = os.environ.get(FOLDER), os.environ.get(PROCESS_ID)
    if folder and process and Path(folder).is_dir():
        (Path(folder) / f"{reached.value}.{process}").touch()


def has_reached(folder: Path, process: int, reached: Reached) -> bool:
    return (folder / f"{reached.value}.{process}").exists()


def say_lost(folder: Path, process: int, what: str) -> None:
    """The launcher's word on a process that is lost; the first one stays."""
    if not (folder / "lost").exists():
        (folder / "lost.new").write_text(f"{process} {what}")
        os.replace(folder / "lost.new", folder / "lost")


def lost_by_launcher() -> str | None:
    """`number of the process, what is known` of one that the launcher has seen end; None where all is well."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    try:
        return (Path(folder) / "lost").read_text()
    except OSError:
        return None
