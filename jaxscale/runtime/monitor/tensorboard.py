"""TensorBoard event files, local only. The only file that imports tensorboardX."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxscale.system import fence, paths
from jaxscale.system.exits import Stop
from jaxscale.system.redact import block_in_markdown

FLUSH_SECONDS = 10.0  # a flush also syncs the disk, which is too slow for every write


class Scalars:
    """TensorBoard scalars in a folder. A failing disk drops values and does not end the run.

    TensorBoard stops reading a file at the first torn record, so a write error starts a new file.
    """

    def __init__(self, folder: pathlib.Path, start_step: int = 0, clock: Callable[[], float] = time.time):
        self.folder, self.start_step, self.clock = folder, start_step, clock
        self.file: EventFile | None = None
        self.problem: str | None = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one event with all scalars of a step."""
        self.attempt(step, lambda file: file.write(step, scalars))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Adds a text, which TensorBoard shows in its text panel."""
        self.attempt(step, lambda file: file.write_text(step, name, text))

    def attempt(self, step: int, add: Callable[["EventFile"], None]) -> None:
        """Adds to the file, after opening one if needed."""
        try:
            if self.file is None:
                self.file = EventFile(self.folder, self.start_step, self.clock)
            add(self.file)
            self.problem = None
        except Stop:  # another process owns the folder
            if self.file is not None:
                self.file.abandon()
            self.file = None
            raise
        except OSError as error:
            self.problem = f"{self.folder} lacks metrics that metrics.jsonl has: {error.strerror or error}"
            if self.file is not None:
                self.file.abandon()
                self.file, self.start_step = None, step  # the next file must not hide the events of this one

    def close(self) -> None:
        """Flushes and closes."""
        if self.file is not None:
            try:
                self.file.close()
            except Stop:  # the lock reports it
                pass
            except OSError as error:
                self.problem = f"{self.folder} lacks its last metrics: {error.strerror or error}"
        self.file = None


class Messages(NamedTuple):
    """tensorboardX's protobuf modules, which are generated and therefore untyped."""

    event: Any
    summary: Any
    tensor: Any
    tensor_shape: Any


def import_messages() -> Messages:
    """Imports the modules; takes 0.1 s, so not before the first metrics are written."""
    from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2

    return Messages(event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2)


class EventFile:
    """One TensorBoard event file, written in the calling thread.

    tensorboardX's SummaryWriter would start a thread and a multiprocessing queue, and put the host name into the file
    name; this uses only its record format and messages.
    """

    def __init__(self, folder: pathlib.Path, start_step: int = 0, clock: Callable[[], float] = time.time):
        from tensorboardX.record_writer import RecordWriter

        self.messages, self.clock = import_messages(), clock
        self.event_type, self.summary_type = self.messages.event.Event, self.messages.summary.Summary
        self.session_type = self.messages.event.SessionLog
        paths.make_folder(folder)
        stem = f"events.out.tfevents.{int(clock())}.jaxscale"
        names = (folder / f"{stem}.{number}" for number in range(1_000_000))
        self.path = next(name for name in names if not name.exists())  # a second start within a second
        self.records, self.flushed_at = RecordWriter(str(self.path)), clock()
        self.pending: list[bytes] = []  # records; the fence is checked once per flush
        try:
            self.begin(start_step)
        except OSError:
            self.abandon()
            self.path.unlink(missing_ok=True)  # do not leave an empty file for each try
            raise

    def begin(self, start_step: int) -> None:
        """Writes the file header."""
        self.add(self.event_type(wall_time=self.clock(), file_version="brain.Event:2"))
        # TensorBoard hides events of earlier processes from this step on, which are repeated
        restart = self.session_type(status=self.session_type.START)
        first = start_step + 1 if start_step else 0  # a new run has a validation before its first step
        self.add(self.event_type(wall_time=self.clock(), step=first, session_log=restart))
        self.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one event with all scalars of a step."""
        values = [self.summary_type.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self.add(self.event_type(wall_time=self.clock(), step=step, summary=self.summary_type(value=values)))
        if self.clock() - self.flushed_at >= FLUSH_SECONDS:
            self.flush()
            self.flushed_at = self.clock()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Adds one event with a text, as a code block since TensorBoard renders Markdown."""
        metadata, shape_type = self.messages.summary.SummaryMetadata, self.messages.tensor_shape.TensorShapeProto
        text_metadata = metadata(plugin_data=metadata.PluginData(plugin_name="text"))
        shape = shape_type(dim=[shape_type.Dim(size=1)])
        tensor = self.messages.tensor.TensorProto(
            dtype="DT_STRING", string_val=[block_in_markdown(text).encode()], tensor_shape=shape
        )
        value = self.summary_type.Value(tag=f"{name}/text_summary", metadata=text_metadata, tensor=tensor)
        self.add(self.event_type(wall_time=self.clock(), step=step, summary=self.summary_type(value=[value])))

    def add(self, event) -> None:
        """Buffers one record for the next flush."""
        self.pending.append(event.SerializeToString())

    def flush(self) -> None:
        """Writes buffered records. Raises: Stop if this process no longer owns the folder; OSError."""
        fence.ask(self.path)
        for record in self.pending:
            self.records.write(record)
        self.pending.clear()
        self.records.flush()

    def close(self) -> None:
        """Flushes and closes."""
        try:
            self.flush()
        finally:
            self.records.close()

    def abandon(self) -> None:
        """Closes a file that cannot be written."""
        with contextlib.suppress(OSError):
            self.records.close()
