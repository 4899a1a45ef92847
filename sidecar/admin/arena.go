package admin

import (
	"lookaside/dax"
	"lookaside/sidecar/arena"
)

// ArenaStatus describes the shared memory, in bytes.
type ArenaStatus struct {
	Kind           dax.Kind        `json:"kind"`
	Reason         string          `json:"reason"`
	LimitBytes     int64           `json:"limit_bytes" doc:"arena.limit, in whole pages; of an arena on DAX, its capacity."`
	CapacityBytes  int64           `json:"capacity_bytes"`
	UsedBytes      int64           `json:"used_bytes"` // of occupied slots
	GrowthFailures uint64          `json:"growth_failures"`
	Regions        []RegionStatus  `json:"regions"`
	State          string          `json:"state" doc:"ready; or, of an arena in memory, what it does at the start: waiting for workers that may give memory back, restoring what is in it, or preparing new memory. Clients are connected meanwhile."`
	KeptChunks     int             `json:"kept_chunks" doc:"Chunks that the next process would find if this one were killed now."`
	WaitingChunks  int             `json:"waiting_chunks" doc:"Chunks that were committed, and wait for their checksums and their entry in the directory: what a kill would lose now."`
	Recovered      RecoveredStatus `json:"recovered"`
	DAX            *DAXArenaState  `json:"dax,omitempty" doc:"Only of an arena on DAX."`
}

// RecoveredStatus describes what was found at the start.
type RecoveredStatus struct {
	Chunks  int    `json:"chunks"`
	Regions int    `json:"regions" doc:"Of memory; 0 of an arena on DAX."`
	Bytes   int64  `json:"bytes" doc:"Of these regions."`
	Why     string `json:"why" doc:"Why nothing was found, or not all; empty if all was."`
	Frozen  bool   `json:"frozen" doc:"Whether nothing is stored in these regions yet, because a process may still copy there that was a client of the sidecar before. What they hold is found."`
	PIDs    []int  `json:"pids" doc:"The processes that are waited for, as far as they are known."`
}

// RegionStatus describes one region.
type RegionStatus struct {
	Region    uint32   `json:"region" doc:"Its number."`
	Kind      dax.Kind `json:"kind" doc:"Of an arena on DAX: devdax, fsdax or file."`
	Device    string   `json:"device,omitempty" doc:"What it lies on, of an arena on DAX."`
	SizeBytes int64    `json:"size_bytes"`
	PageSize  int64    `json:"page_size"`
}

// DAXArenaState describes what only an arena on DAX has.
type DAXArenaState struct {
	HotPlugEnabled   bool       `json:"hotplug_enabled" doc:"Whether devices may be added, removed and resized: arena.dax.hotplug."`
	Devices          []DAXArena `json:"devices" doc:"In the order in which they came."`
	Slabs            int        `json:"slabs" doc:"Pieces that the devices are cut into."`
	SlabsGivenUp     int        `json:"slabs_given_up" doc:"Of these, those that were given up with what they held, because they failed. They are tried again."`
	Error            string     `json:"error" doc:"Why the last of those was given up; empty if there is none."`
	CorruptChunks    uint64     `json:"corrupt_chunks" doc:"Chunks that were checked, before their first use or as they were moved, and dropped because they did not match their checksums."`
	UnreadableChunks uint64     `json:"unreadable_chunks" doc:"Chunks that were dropped because the device could not be read there."`
	UnkeptChunks     uint64     `json:"unkept_chunks" doc:"Chunks that could not be kept, because the device failed there; they can be used until this process ends."`
}

// arenaStatus converts an arena's status to the form that operators see.
func arenaStatus(st *arena.Status) ArenaStatus {
	out := ArenaStatus{Kind: st.Kind, Reason: st.Reason, LimitBytes: st.LimitBytes,
		CapacityBytes: st.CapacityBytes, UsedBytes: st.UsedBytes,
		GrowthFailures: st.GrowthFailures, Regions: []RegionStatus{}, State: string(st.State),
		KeptChunks: st.Kept, WaitingChunks: st.Waiting, Recovered: RecoveredStatus{
			Chunks: st.Found.Chunks, Regions: st.Found.Regions, Bytes: st.Found.Bytes,
			Why: st.Found.Why, Frozen: st.Reuse.Waiting, PIDs: append([]int{}, st.Reuse.PIDs...)},
	}
	for _, r := range st.Regions {
		out.Regions = append(out.Regions, RegionStatus{Region: r.ID, Kind: r.Kind,
			Device: r.Device, SizeBytes: r.SizeBytes, PageSize: r.PageSize})
	}
	if st.DAX == nil {
		return out
	}
	s := &st.DAX.Stats
	out.DAX = &DAXArenaState{
		HotPlugEnabled: st.DAX.HotPlug, Devices: daxArenas(st.DAX.Devices), Slabs: s.Slabs,
		SlabsGivenUp: s.GivenUp, CorruptChunks: s.Corrupt, UnreadableChunks: s.Unreadable,
		UnkeptChunks: s.Failed,
	}
	if s.Why != nil {
		out.DAX.Error = s.Why.Error()
	}
	return out
}
