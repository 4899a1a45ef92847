package admin

import (
	"lookaside/dax"
	"lookaside/sidecar/arena"
)

// ArenaStatus describes the shared memory, in bytes.
type ArenaStatus struct {
	Kind           dax.Kind       `json:"kind"`
	Reason         string         `json:"reason"`
	LimitBytes     int64          `json:"limit_bytes" doc:"arena.limit, in whole pages; of an arena on DAX, its capacity."`
	CapacityBytes  int64          `json:"capacity_bytes"`
	UsedBytes      int64          `json:"used_bytes"` // of occupied slots
	GrowthFailures uint64         `json:"growth_failures"`
	Regions        []RegionStatus `json:"regions"`
	DAX            *DAXArenaState `json:"dax,omitempty" doc:"Only of an arena on DAX."`
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
	RecoveredChunks  int        `json:"recovered_chunks" doc:"Chunks that were found on the devices at the start."`
	CorruptChunks    uint64     `json:"corrupt_chunks" doc:"Chunks that were checked, before their first use or as they were moved, and dropped because they did not match their checksums."`
	UnreadableChunks uint64     `json:"unreadable_chunks" doc:"Chunks that were dropped because the device could not be read there."`
	KeptChunks       int        `json:"kept_chunks" doc:"Chunks that would be found again if this process were killed now."`
	WaitingChunks    int        `json:"waiting_chunks" doc:"Chunks that were committed, and wait for their checksums and their entry on the device: what a kill would lose now."`
	UnkeptChunks     uint64     `json:"unkept_chunks" doc:"Chunks that could not be kept, because the device failed there; they can be used until this process ends."`
}

// arenaStatus converts an arena's status to the form that operators see.
func arenaStatus(st *arena.Status) ArenaStatus {
	out := ArenaStatus{Kind: st.Kind, Reason: st.Reason, LimitBytes: st.LimitBytes,
		CapacityBytes: st.CapacityBytes, UsedBytes: st.UsedBytes,
		GrowthFailures: st.GrowthFailures, Regions: []RegionStatus{}}
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
		SlabsGivenUp: s.GivenUp, RecoveredChunks: st.DAX.Found, CorruptChunks: s.Corrupt,
		UnreadableChunks: s.Unreadable, KeptChunks: s.Kept, WaitingChunks: s.Waiting,
		UnkeptChunks: s.Failed,
	}
	if s.Why != nil {
		out.DAX.Error = s.Why.Error()
	}
	return out
}
