"""One form of a chat for all APIs: roles, parts, tools and calls, reasoning, images."""
