"""The HTTP server: the APIs of OpenAI, Anthropic, Ollama and llama-server over the same models.

Imports go one way: `app` and `lifecycle` use the APIs (`openai`, `anthropic`, `ollama`, `llama`),
these use `answering`, which uses `models` and `http`, and these use the library.
"""
