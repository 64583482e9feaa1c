"""The SGLang plugin: start-up checks, messages, routes, export and lift. Made for SGLang 0.5.23."""
