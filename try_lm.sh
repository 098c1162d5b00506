cd /tmp/mine/un
ls lm/lmcache/v1/server/storage_backend; sed -n 1,200p lm/lmcache/v1/server/__main__.py
