"""The wheel, the image and the compose file, as users get them: tests that install and build for minutes."""
