-- Parts in hand: which requests for parts this nginx is still working on, and which worker fetches each part.
--
-- A request is in hand from its permission until its answer begins; one that fetches the part from the store, until
-- the part is cached. A node that asks learns about its own request only: another node's request for the same part may
-- be in hand although the asking node's request was lost.
--
-- Both facts are leases in the workers' shared memory, which a worker renews as long as it runs. A worker that is
-- killed or hangs renews nothing. Another request that waits for the same part then fetches it, and a node that asks
-- learns that its request is lost. nginx's own lock on a cached file (proxy_cache_lock) would not do: it ends with the
-- answer, or at a certain age. A slow object store may take longer than others should wait for a worker that is gone.
local leases = ngx.shared.parts_in_hand
local LEASE_S = @lease_ms / 1000
local RENEWED_S = LEASE_S / 4
local LOOK_S = 0.1      -- time between two looks at the lease of a part that another request fetches
local FILE_LOOKS = 5    -- number of looks at the lease for each look at the file
local FILES = "@cache_dir/parts"

local parts = {}
package.loaded.parts = parts

local asked = {}        -- by node and part, the number of requests that this worker has not answered yet
local fetched = {}      -- by part that this worker fetches, the holder of the lease: worker and asking node

local function request_of(node, part)
    return node .. " " .. part
end

local function holder_for(node)
    return ngx.worker.pid() .. " " .. node
end

local function node_of(holder)
    return string.match(holder, "^%d+ (.*)$")
end

local function renew()
    for request in pairs(asked) do
        leases:set("asked " .. request, true, LEASE_S)
    end
    for part, holder in pairs(fetched) do
        local found = leases:get("fetched " .. part)
        if found == nil or found == holder then
            leases:set("fetched " .. part, holder, LEASE_S)
        end
    end
end

-- Renew the leases of this worker from now on. After a reload, a worker that finishes its transfers gets only one more
-- turn of its timer, in which it renews them until the transfers end.
function parts.start_worker()
    ngx.timer.every(RENEWED_S, function(is_last_turn)
        renew()
        while is_last_turn and (next(asked) or next(fetched)) do
            ngx.sleep(RENEWED_S)
            renew()
        end
    end)
end

local function is_cached(part)
    local name = ngx.md5(part)
    local file = io.open(FILES .. "/" .. name:sub(-1) .. "/" .. name:sub(-3, -2) .. "/" .. name)
    if file then
        file:close()
    end
    return file ~= nil
end

-- Answer a node's question whether its request for a part is in hand: with status 204 if it is, with 404 if not.
function parts.answer_question(part, node)
    local holder = leases:get("fetched " .. part)
    local is_arriving = holder ~= nil and node_of(holder) == node and not is_cached(part)
    return ngx.exit((is_arriving or leases:get("asked " .. request_of(node, part))) and 204 or 404)
end

-- If a part is cached, fetch it again, past the cache.
function parts.refetch(part)
    if is_cached(part) then
        ngx.exec("@@fresh")
    end
end

-- Have a node's request for a part in hand from now on. The request has its permission already. A request that still
-- waits for one does not count as in hand: it may wait for a node that is dead, and if the daemon sends it again,
-- another node gives the permission.
function parts.take(part, node)
    local request = request_of(node, part)
    ngx.var.asked_request = request
    asked[request] = (asked[request] or 0) + 1
    leases:set("asked " .. request, true, LEASE_S)
end

local function settle()
    local request = ngx.var.asked_request
    if request ~= "" then
        ngx.var.asked_request = ""
        asked[request] = asked[request] > 1 and asked[request] - 1 or nil
        if asked[request] == nil then
            leases:delete("asked " .. request)
        end
    end
end

local function release()
    local part = ngx.var.fetched_part
    if part ~= "" then
        ngx.var.fetched_part = ""
        if leases:get("fetched " .. part) == fetched[part] then
            leases:delete("fetched " .. part)
        end
        fetched[part] = nil
    end
end

-- Return once a part is cached, or this request is to fetch it. With `is_brief`, the part is cached only for a short
-- time, but its file stays for longer, so the file does not count: one request at a time goes on.
function parts.wait(part, node, is_brief)
    local holder = holder_for(node)
    local looks = 0
    while true do
        local is_free = leases:get("fetched " .. part) == nil
        if not is_brief and (is_free or looks % FILE_LOOKS == 0) and is_cached(part) then
            return
        end
        if is_free and leases:add("fetched " .. part, holder, LEASE_S) then
            fetched[part] = holder
            ngx.var.fetched_part = part
            return
        end
        looks = looks + 1
        ngx.sleep(LOOK_S)
    end
end

-- Record that an answer begins. If it comes from the cache, the next request that waits for the part may go on.
function parts.begin_answer()
    settle()
    if ngx.var.upstream_cache_status == "HIT" then
        release()
    end
end

-- Record the end of a request, however it ended.
function parts.leave()
    settle()
    release()
end
