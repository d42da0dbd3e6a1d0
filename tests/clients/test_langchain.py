"""LangChain, by its settings for OpenAI: chats, streams, tools, schemas and embeddings."""

import numpy as np
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from chat_models import WEATHER
from dflash_local import Embedder
from server_process import ServerProcess

QUESTION = "Implement `add` in Python: Return the sum of two numbers."


def client(server: ServerProcess) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="any", model="local", temperature=0, max_tokens=48
    )


def test_a_chat_and_its_stream(server: ServerProcess) -> None:
    llm = client(server)
    whole = llm.invoke(QUESTION)
    assert "def add" in whole.content
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 8
    assert "".join(chunk.content for chunk in llm.stream(QUESTION)) == whole.content
    texts = [answer.content for answer in llm.batch([QUESTION, QUESTION])]
    assert texts == [whole.content] * 2


def test_a_tool_is_called(tool_server: ServerProcess) -> None:
    llm = client(tool_server).bind(max_tokens=400)
    told = llm.bind(tools=[WEATHER], tool_choice="required").invoke("Weather in Paris?")
    assert told.tool_calls[0]["name"] == "get_weather" and "city" in told.tool_calls[0]["args"]


def test_an_answer_follows_a_schema(server: ServerProcess) -> None:
    schema = {
        "title": "verdict",
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    structured = client(server).with_structured_output(schema, method="json_schema")
    assert structured.invoke(QUESTION)["ok"] in (True, False)


def test_texts_become_vectors(embedding_server: ServerProcess, embedder: Embedder) -> None:
    """Else it would send the tokens of a model of OpenAI's."""
    client = OpenAIEmbeddings(
        base_url=f"{embedding_server.url}/v1",
        api_key="any",
        model="local",
        check_embedding_ctx_length=False,
    )
    texts = ["hello world", "the cat sat on the mat"]
    assert np.allclose(client.embed_documents(texts), embedder.embed(texts), atol=1e-6)
    assert np.allclose(client.embed_query(texts[0]), embedder.embed(texts[0]), atol=1e-6)
