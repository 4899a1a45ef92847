// Package elsewhere keeps values in a program of another process, which may be written in any
// language. docs/tiers-elsewhere.md has the protocol; package wire has its messages.
//
// A Program is one such program, over all its runs: it is started (Options.Command) or connected to
// (Options.Socket), watched, and started or connected to again after it has failed. It keeps values
// by keys and knows nothing of chunks. tiers/remote makes a tier of it.
//
// # States
//
//	starting ──▶ serving ──▶ leaving ──▶ paused ──▶ starting
//	    └──────────────────────▶ (a failure)
//
// starting: the process begins, and the handshake goes on. serving: calls are possible. leaving:
// the connection has failed, and its memory may still be written to. paused: nothing is left of it;
// after a pause, which doubles up to a limit, it is tried again. Calls fail at once in the last two
// states.
//
// # Whose memory it is
//
// Values are read from and written to memory that both processes map. Memory of a region that was
// added (AddRegion) is named to the program as it is. All other memory, such as the headers of
// chunks, goes through scratch memory of the Program's own, at the price of a copy.
//
// A program may write to an item's memory until it has reported the item, however late. So Get does
// not return before that, and its caller does not reuse the memory. If a call is not reported in
// time after it was cancelled, the connection is given up:
//
//   - a program that was started here is killed, with its process group;
//   - a program that listens is not ours to kill. Get then waits.
//
// In both cases Get returns when no process has the memory mapped any more, which is known by the
// lifeline: a pipe whose one end came with the first message, is passed on to no other program, and
// is closed by the kernel with the last process that had it. Only Close does not wait for that. It
// strands the claim (ipc.StrandClaim) that came with the lifeline, so that no later sidecar reuses
// the memory as long as the program may write to it.
//
// Put does not wait so long: a program that reads late stores what fails its checksum.
//
// # Trust
//
// A program is trusted as a worker is: it can corrupt memory that it maps, and must not write where
// it was not told to. With Options.Isolated it maps scratch memory only, and is trusted with
// nothing. Everything that it sends is bounded before it is used, each result is accepted once, and
// a reply to nothing ends the connection. What a value's bytes are worth is the caller's to check.
//
// # Goroutines and locks
//
// One goroutine (run) has the life of the program. Each connection has one that receives; it never
// waits for anything else. Callers take the results themselves. Program.mu is taken before conn.mu,
// and none is held across I/O.
package elsewhere
