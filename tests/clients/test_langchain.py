"""LangChain, by its settings for OpenAI: chats, streams, tools and schemas."""

from __future__ import annotations

from langchain_openai import ChatOpenAI

from chat_models import WEATHER
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
