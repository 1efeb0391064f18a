-- Parts in hand: those that some worker of this nginx has still to answer, once the request is permitted, and those that
-- one fetches from the store.
--
-- A node that asks is told about its own request: that another node's is in hand says nothing about one that was lost.
--
-- Both are leases that a worker renews as long as it runs. A worker that is killed or hangs renews nothing: what it
-- fetched, a waiter fetches, and whoever asks is told that its request is lost. nginx's own lock on a cached file ends
-- with the answer or at an age, and a slow object store takes longer than a worker should be waited for.
local leases = ngx.shared.parts_in_hand
local LEASE_S = @lease_ms / 1000
local RENEWED_S = LEASE_S / 4
local LOOK_S = 0.1      -- between two looks of a waiter at the lease
local FILE_LOOKS = 5    -- looks at the lease for each look at the file
local FILES = "@cache_dir/parts"

local parts = {}
package.loaded.parts = parts

local asked = {}        -- number of each node's requests for each part that this worker has not answered yet
local fetched = {}      -- holders of the leases on parts that this worker fetches: itself, and the node that asked

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

-- Renew the leases of this worker from now on. After a reload, a worker that finishes its transfers gets no more turns
-- of its timers but one.
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

-- Tell a node that waits for a part whether a worker that runs has its request in hand.
function parts.tell(part, node)
    local holder = leases:get("fetched " .. part)
    local is_arriving = holder ~= nil and node_of(holder) == node and not is_cached(part)
    return ngx.exit((is_arriving or leases:get("asked " .. request_of(node, part))) and 204 or 404)
end

-- Fetch a part that is cached past the cache.
function parts.refetch(part)
    if is_cached(part) then
        ngx.exec("@@fresh")
    end
end

-- Have a node's request for a part in hand from now on. It is permitted: one that still waits for its permission may wait
-- for a node that is dead, and when it is sent again, another node permits it.
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

-- Return once a part is cached, or this node's request is the one that fetches it. One that is cached for a short time
-- has a file for longer: of its requests, one at a time goes on.
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

-- Note that an answer begins. Where the part turned out to be cached, waiters may look again.
function parts.begin_answer()
    settle()
    if ngx.var.upstream_cache_status == "HIT" then
        release()
    end
end

-- End a request, whatever has become of it.
function parts.leave()
    settle()
    release()
end
