"""The pages: hand-written files that the browser runs as they are. Nothing here is made by a build."""

from tercet_frontend.pages.files import PageFile, chat_page_files, dashboard_files

__all__ = ["PageFile", "chat_page_files", "dashboard_files"]
