package doctor

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/sidecar/settings"
)

// subjectHost is the subject of findings about the host.
const subjectHost = "host"

// one returns a single finding.
func one(id string, level Level, subject, seen, fix string) []Finding {
	return []Finding{{ID: id, Level: level, Subject: subject, Seen: seen, Fix: fix}}
}

var hostChecks = []check{
	{[]string{"host-late"}, hostLate},
	{[]string{"host-memory"}, hostMemory},
	{[]string{"host-hugepages"}, hostHugePages},
	{[]string{"host-memlock"}, hostMemlock},
	{[]string{"host-numa"}, hostNUMA},
	{[]string{"host-shm"}, hostShm},
	{[]string{"host-gpu", "host-driver"}, hostGPU},
	{[]string{"disk-late", "disk-unusable", "disk-missing", "disk-full", "disk-slow", "disk-speed"},
		hostDisks},
}

func hostLate(f *Facts) (out []Finding) {
	for _, what := range f.Late {
		out = append(out, Finding{"host-late", Warning, subjectHost, what + ": not known in time",
			"look whether the machine is overloaded or a file system hangs; raise --timeout"})
	}
	return out
}

// hostMemory compares the arena that would be started with what the host gives now. Of a sidecar
// that runs there is nothing to compare: it has its memory, or says that it could not grow.
func hostMemory(f *Facts) []Finding {
	free := bytesize.Format(max(f.Host.MemAvailable, 0)) + " available of " +
		bytesize.Format(max(f.Host.MemTotal, 0))
	if f.Host.GroupFree >= 0 {
		free += ", " + bytesize.Format(f.Host.GroupFree) + " left by the control group"
	}
	if s := f.At(f.Endpoint); s != nil && s.Serves() || f.Budget == nil {
		return one("host-memory", OK, subjectHost, free, "")
	}
	level := Warning
	if errors.Is(f.Budget, dax.ErrTooLarge) {
		level = Error
	}
	return one("host-memory", level, subjectHost,
		fmt.Sprintf("a sidecar with arena.limit %s does not start here: %v",
			bytesize.Format(f.Config.Arena.Limit), f.Budget),
		"set a smaller arena.limit (--arena-limit), or raise the limit of the container or unit (its memory must cover the arena, 5 % for the index, and 512M)")
}

func hostHugePages(f *Facts) []Finding {
	h := &f.Host
	seen := fmt.Sprintf("%d of %d huge pages free; shmem_enabled is %s", max(h.HugePagesFree, 0),
		max(h.HugePages, 0), h.ShmemEnabled)
	small, why := 0, ""
	for i := range f.Sidecars {
		if s := &f.Sidecars[i]; s.Serves() && s.Status.Arena.Kind == dax.KindMemfd {
			if small++; small == 1 {
				why = fmt.Sprintf("the arena at %s has pages of 4 KiB (%s); ", s.Endpoint,
					s.Status.Arena.Reason)
			}
		}
	}
	if small > 1 {
		why += fmt.Sprintf("so have those of %d other sidecars; ", small-1)
	}
	seen = why + seen
	given := h.HugePagesFree > 0 || h.ShmemEnabled == "advise" || h.ShmemEnabled == "always" ||
		h.ShmemEnabled == "within_size"
	if small == 0 && given {
		return one("host-hugepages", OK, subjectHost, seen, "")
	}
	pages := int64(0)
	if h.HugePageBytes > 0 {
		pages = (f.Config.Arena.Limit + h.HugePageBytes - 1) / h.HugePageBytes
	}
	return one("host-hugepages", Note, subjectHost, seen,
		fmt.Sprintf("attaching an arena is faster with huge pages: sysctl -w vm.nr_hugepages=%d (for %s), or echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; then restart the sidecar",
			pages, bytesize.Format(f.Config.Arena.Limit)))
}

func hostMemlock(f *Facts) []Finding {
	switch limit := f.Host.Memlock; {
	case limit == math.MaxInt64:
		return one("host-memlock", OK, subjectHost, "RLIMIT_MEMLOCK is unlimited", "")
	case limit < 0:
		return nil
	case len(f.Host.GPUs) == 0:
		return one("host-memlock", OK, subjectHost, fmt.Sprintf(
			"RLIMIT_MEMLOCK is %s; nothing is page-locked without a GPU",
			bytesize.Format(limit)), "")
	default:
		return one("host-memlock", Note, subjectHost, fmt.Sprintf(
			"RLIMIT_MEMLOCK is %s here, below the arena; most drivers do not count what CUDA page-locks",
			bytesize.Format(limit)),
			"if vLLM's log says that cuMemHostRegister failed, start vLLM with ulimit -l unlimited (LimitMEMLOCK=infinity, --ulimit memlock=-1)")
	}
}

func hostNUMA(f *Facts) []Finding {
	if f.Host.Nodes <= 1 {
		return one("host-numa", OK, subjectHost, "one NUMA node", "")
	}
	for i := range f.Sidecars {
		s := &f.Sidecars[i]
		if s.Serves() && s.Config != nil && s.Config.Arena.Kind != settings.KindDAX &&
			s.Config.Arena.NUMA == "none" {
			return one("host-numa", Note, subjectHost,
				fmt.Sprintf("%d NUMA nodes, and the sidecar at %s takes its memory from any of them",
					f.Host.Nodes, s.Endpoint),
				"set arena.numa (--arena-numa) to the node of the rank's GPU: nvidia-smi topo -m shows it")
		}
	}
	return one("host-numa", OK, subjectHost, fmt.Sprintf("%d NUMA nodes", f.Host.Nodes), "")
}

// leastShm is what vLLM's own shared memory wants: its message queues, and NCCL's.
const leastShm = 64 << 20

func hostShm(f *Facts) []Finding {
	h := &f.Host
	if h.ShmTotal < 0 {
		return one("host-shm", Warning, subjectHost, "/dev/shm is not there",
			"mount a tmpfs on /dev/shm: vLLM with several ranks needs it (docker run --shm-size=8g, or an emptyDir with medium: Memory). The sidecar does not")
	}
	seen := fmt.Sprintf("/dev/shm has %s free of %s", bytesize.Format(h.ShmFree),
		bytesize.Format(h.ShmTotal))
	if h.ShmFree < leastShm {
		return one("host-shm", Warning, subjectHost, seen,
			"vLLM with several ranks needs /dev/shm: raise its size (docker run --shm-size=8g, mount -o remount,size=8g /dev/shm), or remove what killed servers have left there. The sidecar's arena does not lie in it")
	}
	return one("host-shm", OK, subjectHost, seen, "")
}

// batchedDriver is the first release of NVIDIA's driver that takes many copies in one call.
const batchedDriver = 570

func hostGPU(f *Facts) []Finding {
	h := &f.Host
	if h.Driver == "" {
		return one("host-gpu", OK, subjectHost,
			"no NVIDIA driver here: KV caches are in host memory", "")
	}
	if len(h.GPUs) == 0 {
		return one("host-gpu", Warning, subjectHost,
			fmt.Sprintf("NVIDIA's driver %s is loaded, and no GPU is visible", h.Driver),
			"nvidia-smi says why; in a container, pass the GPUs to it (--gpus all)")
	}
	out := one("host-gpu", OK, subjectHost,
		fmt.Sprintf("driver %s, %s", h.Driver, strings.Join(h.GPUs, ", ")), "")
	major, _, _ := strings.Cut(h.Driver, ".")
	if n, err := strconv.Atoi(major); err == nil && n < batchedDriver {
		out = append(out, Finding{"host-driver", Note, subjectHost, fmt.Sprintf(
			"driver %s copies each run of bytes by a call of its own", h.Driver),
			fmt.Sprintf("a driver of release %d or later (CUDA 12.8) takes thousands of runs in one call",
				batchedDriver)})
	}
	return out
}

// slowDisk is a speed, in bytes a second, below which loading from a disk is rarely worth it.
const slowDisk = 200 << 20

func hostDisks(f *Facts) (out []Finding) {
	for i := range f.Disks {
		out = append(out, f.Disks[i].finding())
	}
	return out
}

func (d *Disk) finding() Finding {
	subject := fmt.Sprintf("tier %s, %s", d.Tier, d.Path)
	speed := fmt.Sprintf("%s/s written, %s/s read", bytesize.Format(int64(d.Write)),
		bytesize.Format(int64(d.Read)))
	if !d.Direct {
		speed += " (through the page cache: its file system has no O_DIRECT)"
	}
	free := bytesize.Format(max(d.Free, 0)) + " free"
	switch {
	case d.Late:
		return Finding{"disk-late", Error, subject, "the directory did not answer in time",
			"the disk or the server behind it hangs: look at dmesg and at the mount; take the tier out until it is well"}
	case d.Err != nil:
		return Finding{"disk-unusable", Error, subject, d.Err.Error(),
			"have the sidecar's user own the directory, on a file system that is mounted for writing; dmesg has I/O errors"}
	case d.Missing && d.Used:
		return Finding{"disk-missing", Error, subject, "the directory does not exist, and a sidecar that runs has it",
			"mount the disk: the sidecar tries it again by itself"}
	case d.Missing:
		return Finding{"disk-missing", Warning, subject, "the directory does not exist",
			"mount the disk first if it lies on one; else the sidecar makes the directory on the file system above it"}
	case !d.Used && d.Free >= 0 && d.Free < d.Capacity && !d.Store:
		return Finding{"disk-full", Error, subject, fmt.Sprintf(
			"%s, and %s are to be taken: a sidecar does not start so", free,
			bytesize.Format(d.Capacity)), "set a smaller capacity for the tier, or make room"}
	case d.Tested && (d.Read < slowDisk || d.Write < slowDisk):
		return Finding{"disk-slow", Warning, subject, speed,
			"loading from this disk is rarely faster than computing: use a local NVMe disk, or set lookup.promote: auto and let vLLM recompute"}
	case d.Tested:
		return Finding{"disk-speed", OK, subject, speed + "; " + free, ""}
	}
	return Finding{"disk-speed", OK, subject, "not measured; " + free, ""}
}
