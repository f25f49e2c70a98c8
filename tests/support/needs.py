"""What some tests need and a machine may lack: without it they are skipped, and say which package it is in."""

import multiprocessing
import shutil
import unittest

try:
    import markdown_it  # noqa: F401
    import pygments  # noqa: F401
    has_page_packages = True
except ImportError:
    has_page_packages = False

try:
    multiprocessing.Lock()
    has_semaphores = True
except (ImportError, OSError):
    has_semaphores = False

git = unittest.skipUnless(shutil.which("git"), "needs git (apt-get install git)")
page_packages = unittest.skipUnless(has_page_packages, "needs markdown-it-py and pygments "
                                                       "(apt-get install python3-markdown-it python3-pygments)")
semaphores = unittest.skipUnless(has_semaphores, "needs semaphores that processes share (/dev/shm)")
