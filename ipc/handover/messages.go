package handover

// Version is the version of all messages but Begin and Refuse, whose form stays the same for ever,
// so that sidecars of different releases can tell that they do not fit. It changes with every
// change of what is handed over.
const Version = 2

// Types of messages, in the order in which they are sent.
const (
	TypeBegin  = 1 // from the new process: asks for the handover
	TypeRefuse = 2 // from the old process: it goes on serving
	TypeHeld   = 3 // from the old process: stores are held back, and none is open
	TypeGo     = 4 // from the new process: from here on there is no way back
	TypeMemory = 5 // from the old process, with files: all that does not change any more
	TypeReady  = 6 // from the new process: it has restored what the memory holds
	TypeState  = 7 // from the old process, which has stopped: sessions, lookups and leases
	TypeDone   = 8 // from the new process: it serves
)

// maxText bounds the texts of Begin and Refuse, and maxPins the list of pins.
const (
	maxText = 4096
	maxPins = 16 << 20
)

// Begin asks the sidecar that serves to hand over.
type Begin struct {
	Handover  uint32 // Version
	Protocol  uint32 // of the clients' messages
	Directory uint32 // version of the arena's directory
	Release   string // of the new process, for people
	PID       int

	// The settings of the new process that decide whether it can take what the old one holds.
	ArenaKind   string
	ArenaPath   string
	LimitBytes  int64 // of the arena
	MaxSessions int
	MaxSpaces   int
	MaxPages    int
	Lossy       string // how its tiers change what they keep, "" for not at all
}

// Fields names the fields.
func (m *Begin) Fields(c *Coder) {
	c.Uint32(&m.Handover)
	c.Uint32(&m.Protocol)
	c.Uint32(&m.Directory)
	c.Text(&m.Release, maxText)
	c.Int(&m.PID, 1<<31)
	c.Text(&m.ArenaKind, maxText)
	c.Text(&m.ArenaPath, maxText)
	c.Int64(&m.LimitBytes)
	c.Int(&m.MaxSessions, 1<<31)
	c.Int(&m.MaxSpaces, 1<<31)
	c.Int(&m.MaxPages, 1<<31)
	c.Text(&m.Lossy, maxText)
}

// Refuse says why nothing is handed over.
type Refuse struct{ Reason string }

// Fields names the fields.
func (m *Refuse) Fields(c *Coder) { c.Text(&m.Reason, maxText) }

// Memory is what does not change any more: the files are the lock file, the listening session
// socket and the regions.
type Memory struct {
	Generation uint64
	PeerRegion uint32 // the next number for a region of another sidecar; 0: none was numbered
	Pins       []byte // the list of pins, as operators see it, in JSON
}

// Fields names the fields.
func (m *Memory) Fields(c *Coder) {
	c.Uint64(&m.Generation)
	c.Uint32(&m.PeerRegion)
	c.Bytes(&m.Pins, maxPins)
}
