#!/bin/sh
set -e
cd /app
mkdir -p dist
echo "VERSION = '$(cat VERSION)'" >greet/version.py
python3 -m zipapp greet --main cli:main --output dist/greet.pyz
