// Package directory keeps what the next process must know to find the chunks of an arena in memory.
//
// The memory itself lies in regions that other processes hold as well: workers, systemd, or the
// process that takes over. The directory lies in a file of its own that no client gets. It says
// which regions there are, how they are carved, and what is in each slot. A process that is killed
// leaves it as it is.
//
// # The file
//
//	0        header, two copies of 4 KiB each; of the intact ones that of the higher epoch counts
//	8 KiB    regions: 64 records of 128 bytes
//	16 KiB   pieces: 64 records of 128 bytes
//	64 KiB   entries: a part for each region, as large as the region
//
// Numbers are little-endian. Bytes that are not described mean nothing. The entries have the form
// of package media. The entry of slot i of a piece lies i entries behind the place in the region's
// part at which the piece lies in the region. An entry is smaller than its slot, so the entries of
// two pieces never overlap, and nothing decides where they lie but where the piece lies. The file
// is sparse: it takes 128 bytes and 40 bytes a page (with digests of 32 bytes) for each chunk that
// the arena has had at a time, in whole pages of the filesystem.
//
// # What a kill leaves
//
// A record, or an entry, is valid if its checksum, in its first 8 bytes, is right. It is written
// with zeros there. Storing the checksum is one store of 8 bytes into the mapped file, and makes it
// valid; storing 0 makes it invalid. No valid record is written over, except the header, of which
// there are two. An entry is written over when its chunk has grown: it is invalid until the longer
// one is valid, some microseconds, and its chunk is not found if the process dies then. Nothing is
// synced: the kernel keeps what a killed process wrote, and a directory of before the machine's
// last start is not used.
//
// A piece is bare until its first entry is written: what lies in its place is of pieces that were
// there before, and is not read. The record of a bare piece has the complement of its checksum.
// Storing the checksum makes the entries count, once the place is empty and nobody writes there for
// another piece.
//
// An entry is made valid under the engine's lock, and only if its slot still holds its chunk
// (Engine.Publish). It is made invalid under that lock before the slot can be granted
// (Config.OnGone). So each valid entry names, at any instant, a chunk that is held, and nobody has
// the right to write its pages. Every other slot is free when the arena is found.
//
// # Trust
//
// Only this user can write the file, but a program of another version may have written it, or a
// disk damaged it. So nothing that is read is used before it was checked, and nothing that is read
// decides how much is allocated. Any bytes decode to something or to an error. Entries are read
// with system calls: a file that is cut short meanwhile makes them fail, and is no fault.
//
// # Concurrency
//
// Any goroutine may call the methods of a Directory. The hooks (OnCarve, OnUncarve, OnGone) run
// under the engine's lock. They take no lock that is held during a system call, except that OnCarve
// takes Directory.mu, which AddRegion and Drop hold while they change the file.
//
// A keeper handles a chunk without a lease: it may go meanwhile, and then Publish refuses its
// entry. Keepers that handle the same slot take turns. A keeper that still writes for a piece that
// is gone ends before the first entry is written for a piece that lies where that one lay.
package directory
