// Package faults holds no code: its tests run the tiers on disk against media that really fail. A
// loop device over a file that is too short or a file system that is full, power cut by ext4's
// shutdown, a FUSE file system that flips bits, tears writes and answers late, errors that strace
// puts into system calls, and full disks. Most need root; what cannot be done on a machine is
// skipped, with the reason.
package faults
