"""The llama.cpp of this process: its library, its devices and the host it runs on."""
