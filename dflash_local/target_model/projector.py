"""A target's eyes: the projector of an `mmproj` file, by llama.cpp's libmtmd."""

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_local.errors import BackendError, ClosedError, FileError, InputError
from dflash_local.gguf.file import file_key
from dflash_local.llama import runtime
from dflash_local.llama.runtime import api
from dflash_local.target_model.images import MOST_MORE, Embeddings, Image, ImageText
from dflash_local.target_model.pixels import Opener
from dflash_local.target_model.target import Target

_MARKER = b"<__media__>"


class Projector:
    """Makes rows for a target of pictures. Any thread may `read` pictures. A thread of its own
    computes them, one after the other. The target closes it before itself."""

    def __init__(self, path: str | os.PathLike[str], target: Target) -> None:
        """Raises FileError if libmtmd refuses the file, or it is for another target, and
        BackendError without libmtmd."""
        self.path = Path(path)
        self._target = target
        self._mtmd = runtime.libmtmd()
        self._lock = threading.Lock()
        self._opener = Opener()
        self._eyes = ThreadPoolExecutor(1, "dflash-local-eyes")
        self._context: Any = None
        self._key = repr(file_key(self.path)).encode()
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu = target.options.n_gpu_layers != 0
        params.print_timings = params.warmup = False
        params.n_threads = target.n_threads
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_AUTO
            if target.options.flash_attn
            else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        runtime.clear_log()
        model = ctypes.c_void_p(target.address)
        self._context = self._mtmd.mtmd_init_from_file(os.fsencode(path), model, params)
        if not self._context:
            raise FileError(f"libmtmd cannot load {path} for this target: {runtime.reason()}")
        target.attach(self)
        if not self._mtmd.mtmd_support_vision(self._context):
            self.close()
            raise FileError(f"{path} reads no images; give the mmproj file of a vision model")

    def close(self) -> None:
        """Free everything. Safe to call again."""
        self._eyes.shutdown(cancel_futures=True)
        with self._lock:
            context, self._context = self._context, None
        if context:
            self._mtmd.mtmd_free(context)

    def read(self, data: bytes) -> ImageText:
        """A picture's place in a prompt: an id for each position that it takes, with the tokens
        that the target wants around it. It is computed when the prompt is decoded.

        Raises InputError as `pixels`, and for one that is too large for a batch.
        """
        name = hashlib.sha256(data).digest()
        width, height = self._opener.size(name, data)
        key = hashlib.sha256(self._key + name).digest()
        text = ImageText()
        with self._lock, self._chunks(width, height) as chunks:
            for i, chunk in enumerate(chunks):
                kind = self._mtmd.mtmd_input_chunk_get_type(chunk)
                if kind == self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    n = ctypes.c_size_t()
                    found = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
                    text.tokens += found[: n.value]
                else:
                    image = Image(
                        self._mtmd.mtmd_input_chunk_get_n_tokens(chunk),
                        self._mtmd.mtmd_input_chunk_get_n_pos(chunk),
                        partial(self._begin, name, data, i),
                    )
                    self._check_size(image, chunk)
                    text.add_image(image, key + i.to_bytes(4, "little"))
        return text

    def _check_size(self, image: Image, chunk: Any) -> None:
        n, most = image.n_rows, self._target.n_batch
        if n > most and self._mtmd.mtmd_decode_use_non_causal(self._context, chunk):
            raise InputError(
                f"an image of {n} tokens, which this target reads at once, and n_batch is {most}; "
                f"load with n_batch={n} or more"
            )
        if not 0 <= image.n_more <= MOST_MORE:
            raise InputError(f"an image of {n} tokens; give a smaller one")

    def _begin(self, name: bytes, data: bytes, index: int, begin: int) -> Future[Embeddings]:
        return self._eyes.submit(self._embeddings, name, data, index, begin)

    def _embeddings(self, name: bytes, data: bytes, index: int, begin: int) -> Embeddings:
        width, height, rgb = self._opener.take(name, data)
        mtmd = self._mtmd
        with self._chunks(width, height, rgb) as chunks:
            chunk = chunks[index]
            n = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            runtime.clear_log()
            if mtmd.mtmd_encode_chunk(self._context, chunk):
                raise BackendError(f"libmtmd cannot compute an image: {runtime.reason()}")
            width = api.llama_model_n_embd_inp(ctypes.c_void_p(self._target.address))
            found = mtmd.mtmd_get_output_embd(self._context)
            rows = np.ctypeslib.as_array(found, (n, width)).copy()
            positions = np.arange(begin, begin + n, dtype=np.int32)[None]
            if mtmd.mtmd_decode_use_mrope(self._context):
                places = (mtmd.mtmd_decoder_pos * n)()
                tokens = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
                mtmd.mtmd_helper_image_get_decoder_pos(tokens, begin, places)
                positions = np.array([[p.t, p.y, p.x, p.z] for p in places], np.int32).T
            is_causal = not mtmd.mtmd_decode_use_non_causal(self._context, chunk)
        return Embeddings(rows, positions, is_causal)

    @contextmanager
    def _chunks(self, width: int, height: int, rgb: bytes | None = None) -> Iterator[list[Any]]:
        """The chunks that libmtmd makes of a picture; without its pixels only to be counted."""
        mtmd = self._mtmd
        if not self._context:
            raise ClosedError("this model is closed; load it again")
        data = None if rgb is None else (ctypes.c_uint8 * len(rgb)).from_buffer_copy(rgb)
        bitmap = mtmd.mtmd_bitmap_init(width, height, data)
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            text = mtmd.mtmd_input_text(_MARKER, len(_MARKER), False, True)
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            if mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
                raise InputError(f"an image of {width} x {height} pixels cannot be read here")
            n = mtmd.mtmd_input_chunks_size(chunks)
            yield [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(n)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)
