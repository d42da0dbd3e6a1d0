"""LlamaIndex, by its settings for servers that are like OpenAI's."""

import numpy as np
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from dflash_local import Embedder
from server_process import ServerProcess

QUESTION = "Implement `add` in Python: Return the sum of two numbers."


def client(server: ServerProcess, *, is_chat: bool) -> OpenAILike:
    return OpenAILike(
        api_base=f"{server.url}/v1",
        api_key="any",
        model="local",
        is_chat_model=is_chat,
        temperature=0,
        max_tokens=48,
    )


def test_a_chat_and_its_stream(server: ServerProcess) -> None:
    llm = client(server, is_chat=True)
    messages = [ChatMessage(role="user", content=QUESTION)]
    whole = llm.chat(messages).message.content
    assert whole and "def add" in whole
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat(messages)) == whole


def test_a_completion_and_its_stream(server: ServerProcess) -> None:
    llm = client(server, is_chat=False)
    whole = llm.complete("def add(a, b):").text
    assert whole
    assert "".join(chunk.delta or "" for chunk in llm.stream_complete("def add(a, b):")) == whole


def test_texts_become_vectors(embedding_server: ServerProcess, embedder: Embedder) -> None:
    api_base = f"{embedding_server.url}/v1"
    client = OpenAILikeEmbedding(model_name="local", api_base=api_base, api_key="any")
    texts = ["hello world", "the cat sat on the mat"]
    found = client.get_text_embedding_batch(texts)
    assert np.allclose(found, embedder.embed(texts), atol=1e-6)
