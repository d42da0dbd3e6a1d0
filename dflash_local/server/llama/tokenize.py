"""`/tokenize`, `/detokenize`, `/apply-template`: llama-server's ways to see tokens and prompts."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from dflash_local.model import Model
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import on_model
from dflash_local.server.http.errors import bad_request
from dflash_local.server.openai.chat import ChatRequest, prepare_request
from dflash_local.target_model.vocabulary import Vocabulary

_MOST_PIECES = 100_000
Piece = bounds.Text | bounds.TokenId
Pieces = Annotated[bounds.ListOf[Piece], Field(max_length=4 << 20)]


class TokenizeRequest(BaseModel):
    """llama-server's defaults: nothing is put before the text, and special tokens are read."""

    model: bounds.Label | None = None
    content: bounds.Text | Pieces = ""
    add_special: bounds.Flag = False
    parse_special: bounds.Flag = True
    with_pieces: bounds.Flag = False

    @property
    def pieces(self) -> list[str | int]:
        return [self.content] if isinstance(self.content, str) else self.content


class DetokenizeRequest(BaseModel):
    model: bounds.Label | None = None
    tokens: bounds.TokenIds = Field(default_factory=list)


router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text. With `with_pieces` also their texts, or the bytes of those that are not
    a text by themselves."""
    return {"tokens": await on_model(request, body.model, body, _tokens)}


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, control tokens by their names."""

    def text(model: Model, body: DetokenizeRequest) -> str:
        return model.target.vocabulary.detokenize(body.tokens, special=True)

    return {"content": await on_model(request, body.model, body, text)}


@router.post("/apply-template")
async def apply_template(request: Request, body: ChatRequest) -> dict[str, str]:
    """The prompt of a chat as the template writes it. Nothing is generated."""
    body.check()
    prepare = partial(prepare_request, bound=False)
    return {"prompt": (await on_model(request, body.model, body, prepare)).text}


def mixed_tokens(
    vocabulary: Vocabulary,
    pieces: Sequence[str | int],
    *,
    special: bool = True,
    add_special: bool = True,
    n_ctx: int | None = None,
) -> list[int]:
    """Token ids of texts and ids in a row; a text in front begins as the model wants it.

    Raises as `Vocabulary.tokenize`.
    """
    tokens: list[int] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            tokens.append(piece)
        else:
            first = add_special and not index
            tokens += vocabulary.tokenize(piece, special=special, add_special=first, n_ctx=n_ctx)
            if n_ctx is not None and len(tokens) > n_ctx:
                break  # it is too long already
    return tokens


def mixed_text(vocabulary: Vocabulary, given: str | Sequence[str | int]) -> str:
    """The text that texts and ids in a row make. Raises InputError for an id of no token."""
    if isinstance(given, str):
        return given
    text = ""
    for of_ids, run in groupby(given, lambda piece: isinstance(piece, int)):
        pieces: list[Any] = list(run)
        text += vocabulary.detokenize(pieces) if of_ids else "".join(pieces)
    return text


def _tokens(model: Model, body: TokenizeRequest) -> list[Any]:
    vocabulary = model.target.vocabulary
    n_bytes = sum(len(piece.encode()) for piece in body.pieces if isinstance(piece, str))
    most = vocabulary.most_bytes(model.n_ctx)
    if n_bytes > most:
        raise bad_request(
            f"the text has {n_bytes} bytes; at most {most} are taken at once, so send it in parts",
            param="content",
        )
    tokens = mixed_tokens(
        vocabulary, body.pieces, special=body.parse_special, add_special=body.add_special
    )
    if not body.with_pieces:
        return tokens
    if len(tokens) > _MOST_PIECES:
        raise bad_request(
            f"the text has {len(tokens)} tokens; with_pieces takes at most {_MOST_PIECES}",
            param="with_pieces",
        )
    return [{"id": token, "piece": _piece(vocabulary, token)} for token in tokens]


def _piece(vocabulary: Vocabulary, token: int) -> str | list[int]:
    piece = vocabulary.piece(token, special=True)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
