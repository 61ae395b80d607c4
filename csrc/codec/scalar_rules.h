#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "base/host_device.h"
#include "base/narrow_float.h"

namespace lowcomm {

// The numbers of the scalar codecs (FORMAT.md, "Scalars: logbyte, log9"), so that no libm decides a byte.
// scalar_test.cpp derives them again.

// The least float32 of exp((e - 64.5) / 8) and more, for e = 2...127: where e begins.
inline constexpr float kLogByteBounds[126] = {
    0x1.a84d1ep-12f, 0x1.e0cbd8p-12f, 0x1.106824p-11f, 0x1.34ad66p-11f, 0x1.5dc6f8p-11f, 0x1.8c597ap-11f,
    0x1.c11f74p-11f, 0x1.fcec4p-11f,  0x1.2057b4p-10f, 0x1.46bc26p-10f, 0x1.723d3cp-10f, 0x1.a38936p-10f,
    0x1.db6584p-10f, 0x1.0d58f2p-9f,  0x1.3135ecp-9f,  0x1.59d954p-9f,  0x1.87e5fp-9f,   0x1.bc142ep-9f,
    0x1.f7350ep-9f,  0x1.1d1abp-8f,   0x1.4310c2p-8f,  0x1.6e14c4p-8f,  0x1.9ed302p-8f,  0x1.d60eb6p-8f,
    0x1.0a528cp-7f,  0x1.2dc86ap-7f,  0x1.55f6fcp-7f,  0x1.837f32p-7f,  0x1.b7176ap-7f,  0x1.f18e4ap-7f,
    0x1.19e6fep-6f,  0x1.3f6feap-6f,  0x1.69f84p-6f,   0x1.9a2a5ap-6f,  0x1.d0c74p-6f,   0x1.0754d8p-5f,
    0x1.2a64c2p-5f,  0x1.521fcep-5f,  0x1.7f251cp-5f,  0x1.b228fcp-5f,  0x1.ebf7c6p-5f,  0x1.16bc8p-4f,
    0x1.3bd98p-4f,   0x1.65e78ep-4f,  0x1.958f16p-4f,  0x1.cb8ef8p-4f,  0x1.045fbep-3f,  0x1.270adap-3f,
    0x1.4e53aap-3f,  0x1.7ad788p-3f,  0x1.ad48bep-3f,  0x1.e67152p-3f,  0x1.139b1ap-2f,  0x1.384d68p-2f,
    0x1.61e28cp-2f,  0x1.910112p-2f,  0x1.c665b2p-2f,  0x1.017324p-1f,  0x1.23ba94p-1f,  0x1.4a9272p-1f,
    0x1.769654p-1f,  0x1.a87682p-1f,  0x1.e0facp-1f,   0x1.1082b6p0f,   0x1.34cb82p0f,   0x1.5de918p0f,
    0x1.8c8026p0f,   0x1.c14b44p0f,   0x1.fd1de8p0f,   0x1.2073d4p1f,   0x1.46dc06p1f,   0x1.72615cp1f,
    0x1.a3b224p1f,   0x1.db93e4p1f,   0x1.0d7338p2f,   0x1.3153b2p2f,   0x1.59fb12p2f,   0x1.880c2cp2f,
    0x1.bc3f82p2f,   0x1.f76626p2f,   0x1.1d3682p3f,   0x1.433046p3f,   0x1.6e387ap3f,   0x1.9efb7ap3f,
    0x1.d63c9p3f,    0x1.0a6c86p4f,   0x1.2de5dap4f,   0x1.561858p4f,   0x1.83a5p4f,     0x1.b7424p4f,
    0x1.f1bed4p4f,   0x1.1a027ep5f,   0x1.3f8f14p5f,   0x1.6a1b9p5f,    0x1.9a525ep5f,   0x1.d0f498p5f,
    0x1.076e88p6f,   0x1.2a81dep6f,   0x1.5240cap6f,   0x1.7f4a7cp6f,   0x1.b25358p6f,   0x1.ec27c4p6f,
    0x1.16d7bp7f,    0x1.3bf852p7f,   0x1.660a78p7f,   0x1.95b6a8p7f,   0x1.cbbbcep7f,   0x1.047926p8f,
    0x1.2727a2p8f,   0x1.4e7448p8f,   0x1.7afc7ep8f,   0x1.ad729ep8f,   0x1.e6a0c6p8f,   0x1.13b5fep9f,
    0x1.386bep9f,    0x1.620512p9f,   0x1.91283p9f,    0x1.c69208p9f,   0x1.018c42p10f,  0x1.23d70ap10f,
    0x1.4ab2b2p10f,  0x1.76baep10f,   0x1.a89fecp10f,  0x1.e129aep10f,  0x1.109d4cp11f,  0x1.34e9a2p11f,
};

// exp((u - 128) / 16) for u = 1...255, the nearest float32.
inline constexpr float kLog9Values[255] = {
    0x1.7671ccp-12f, 0x1.8e9818p-12f, 0x1.a84d1cp-12f, 0x1.c3aa92p-12f, 0x1.e0cbd8p-12f, 0x1.ffce12p-12f,
    0x1.106822p-11f, 0x1.21f9bap-11f, 0x1.34ad64p-11f, 0x1.4895d6p-11f, 0x1.5dc6f8p-11f, 0x1.7455fep-11f,
    0x1.8c597ap-11f, 0x1.a5e97p-11f,  0x1.c11f72p-11f, 0x1.de16bap-11f, 0x1.fcec4p-11f,  0x1.0edf6ep-10f,
    0x1.2057b2p-10f, 0x1.32f066p-10f, 0x1.46bc24p-10f, 0x1.5bcebap-10f, 0x1.723d3cp-10f, 0x1.8a1e18p-10f,
    0x1.a38934p-10f, 0x1.be97fep-10f, 0x1.db6582p-10f, 0x1.fa0e96p-10f, 0x1.0d58fp-9f,   0x1.1eb806p-9f,
    0x1.3135eap-9f,  0x1.44e52p-9f,   0x1.59d954p-9f,  0x1.70277ep-9f,  0x1.87e5fp-9f,   0x1.a12c66p-9f,
    0x1.bc142ep-9f,  0x1.d8b82ep-9f,  0x1.f7350cp-9f,  0x1.0bd4a6p-8f,  0x1.1d1abp-8f,   0x1.2f7decp-8f,
    0x1.4310cp-8f,   0x1.57e6cp-8f,   0x1.6e14c2p-8f,  0x1.85b0fap-8f,  0x1.9ed3p-8f,    0x1.b993fep-8f,
    0x1.d60eb4p-8f,  0x1.f45fap-8f,   0x1.0a528ap-7f,  0x1.1b7faep-7f,  0x1.2dc868p-7f,  0x1.413f04p-7f,
    0x1.55f6fap-7f,  0x1.6c0504p-7f,  0x1.837f32p-7f,  0x1.9c7cfep-7f,  0x1.b7176ap-7f,  0x1.d36912p-7f,
    0x1.f18e48p-7f,  0x1.08d29cp-6f,  0x1.19e6fcp-6f,  0x1.2c155cp-6f,  0x1.3f6fe8p-6f,  0x1.540ap-6f,
    0x1.69f83ep-6f,  0x1.815094p-6f,  0x1.9a2a58p-6f,  0x1.b49e6ap-6f,  0x1.d0c73ep-6f,  0x1.eec102p-6f,
    0x1.0754d8p-5f,  0x1.185098p-5f,  0x1.2a64c2p-5f,  0x1.3da368p-5f,  0x1.521fccp-5f,  0x1.67ee6ep-5f,
    0x1.7f251ap-5f,  0x1.97db0cp-5f,  0x1.b228fcp-5f,  0x1.ce2938p-5f,  0x1.ebf7c4p-5f,  0x1.05d938p-4f,
    0x1.16bc7ep-4f,  0x1.28b698p-4f,  0x1.3bd98p-4f,   0x1.50385cp-4f,  0x1.65e78cp-4f,  0x1.7cfcc2p-4f,
    0x1.958f16p-4f,  0x1.afb718p-4f,  0x1.cb8ef8p-4f,  0x1.e9328cp-4f,  0x1.045fbep-3f,  0x1.152aaap-3f,
    0x1.270adap-3f,  0x1.3a122cp-3f,  0x1.4e53aap-3f,  0x1.63e398p-3f,  0x1.7ad788p-3f,  0x1.93466ep-3f,
    0x1.ad48bcp-3f,  0x1.c8f878p-3f,  0x1.e6715p-3f,   0x1.02e862p-2f,  0x1.139b1ap-2f,  0x1.256184p-2f,
    0x1.384d68p-2f,  0x1.4c71b2p-2f,  0x1.61e28ap-2f,  0x1.78b564p-2f,  0x1.91011p-2f,   0x1.aaddep-2f,
    0x1.c665b2p-2f,  0x1.e3b40ep-2f,  0x1.017324p-1f,  0x1.120dcap-1f,  0x1.23ba94p-1f,  0x1.368b3p-1f,
    0x1.4a9272p-1f,  0x1.5fe462p-1f,  0x1.769652p-1f,  0x1.8ebefap-1f,  0x1.a87682p-1f,  0x1.c3d6a2p-1f,
    0x1.e0facp-1f,   0x1p0f,          0x1.1082b6p0f,   0x1.221604p0f,   0x1.34cb82p0f,   0x1.48b5e4p0f,
    0x1.5de918p0f,   0x1.747a52p0f,   0x1.8c8024p0f,   0x1.a61298p0f,   0x1.c14b44p0f,   0x1.de455ep0f,
    0x1.fd1de6p0f,   0x1.0ef9dcp1f,   0x1.2073d4p1f,   0x1.330e58p1f,   0x1.46dc04p1f,   0x1.5bf0a8p1f,
    0x1.72615ap1f,   0x1.8a448cp1f,   0x1.a3b222p1f,   0x1.bec38ep1f,   0x1.db93e4p1f,   0x1.fa3ff4p1f,
    0x1.0d7338p2f,   0x1.1ed3fep2f,   0x1.3153b2p2f,   0x1.4504d2p2f,   0x1.59fb12p2f,   0x1.704b6ap2f,
    0x1.880c2ap2f,   0x1.a1551ap2f,   0x1.bc3f8p2f,    0x1.d8e64cp2f,   0x1.f76624p2f,   0x1.0beec6p3f,
    0x1.1d368p3f,    0x1.2f9b88p3f,   0x1.433044p3f,   0x1.58084cp3f,   0x1.6e387ap3f,   0x1.85d6fep3f,
    0x1.9efb78p3f,   0x1.b9bf12p3f,   0x1.d63c9p3f,    0x1.f4907p3f,    0x1.0a6c86p4f,   0x1.1b9b56p4f,
    0x1.2de5dap4f,   0x1.415e5cp4f,   0x1.561858p4f,   0x1.6c2888p4f,   0x1.83a4fep4f,   0x1.9ca53cp4f,
    0x1.b7424p4f,    0x1.d396aap4f,   0x1.f1bed4p4f,   0x1.08ec72p5f,   0x1.1a027ep5f,   0x1.2c32a2p5f,
    0x1.3f8f12p5f,   0x1.542b2ep5f,   0x1.6a1b8ep5f,   0x1.81762ap5f,   0x1.9a525cp5f,   0x1.b4c902p5f,
    0x1.d0f496p5f,   0x1.eef146p5f,   0x1.076e88p6f,   0x1.186bf2p6f,   0x1.2a81dep6f,   0x1.3dc266p6f,
    0x1.5240cap6f,   0x1.68118ap6f,   0x1.7f4a7cp6f,   0x1.9802d6p6f,   0x1.b25358p6f,   0x1.ce564ep6f,
    0x1.ec27c4p6f,   0x1.05f2c4p7f,   0x1.16d7bp7f,    0x1.28d38ap7f,   0x1.3bf85p7f,    0x1.50592ap7f,
    0x1.660a78p7f,   0x1.7d21eep7f,   0x1.95b6a6p7f,   0x1.afe136p7f,   0x1.cbbbccp7f,   0x1.e96244p7f,
    0x1.047924p8f,   0x1.1545b4p8f,   0x1.2727a2p8f,   0x1.3a30dp8f,    0x1.4e7448p8f,   0x1.64065p8f,
    0x1.7afc7cp8f,   0x1.936dc6p8f,   0x1.ad729ep8f,   0x1.c9250cp8f,   0x1.e6a0c6p8f,   0x1.0301a4p9f,
    0x1.13b5fcp9f,   0x1.257e22p9f,   0x1.386bdep9f,   0x1.4c9222p9f,   0x1.620512p9f,   0x1.78da24p9f,
    0x1.91283p9f,    0x1.ab0786p9f,   0x1.c69206p9f,   0x1.e3e34p9f,    0x1.018c42p10f,  0x1.122886p10f,
    0x1.23d708p10f,  0x1.36a97cp10f,  0x1.4ab2b2p10f,  0x1.6006b6p10f,  0x1.76badep10f,  0x1.8ee5ep10f,
    0x1.a89feap10f,  0x1.c402b6p10f,  0x1.e129acp10f,  0x1.0018fap11f,  0x1.109d4cp11f,  0x1.223252p11f,
    0x1.34e9a2p11f,  0x1.48d5f6p11f,  0x1.5e0b3ap11f,
};

// The least float32 of exp((u - 128.5) / 16) and more, for u = 2...255: where u begins.
inline constexpr float kLog9Bounds[254] = {
    0x1.8254a6p-12f, 0x1.9b3f32p-12f, 0x1.b5c51ep-12f, 0x1.d200f4p-12f, 0x1.f00ef2p-12f, 0x1.080694p-11f,
    0x1.190dccp-11f, 0x1.2b2e2ap-11f, 0x1.3e79cep-11f, 0x1.530406p-11f, 0x1.68e15ep-11f, 0x1.8027b6p-11f,
    0x1.98ee56p-11f, 0x1.b34e08p-11f, 0x1.cf612ap-11f, 0x1.ed43d4p-11f, 0x1.0689f6p-10f, 0x1.1778a2p-10f,
    0x1.297edep-10f, 0x1.3caebp-10f,  0x1.511b4cp-10f, 0x1.66d92p-10f,  0x1.7dfdeap-10f, 0x1.96a0d2p-10f,
    0x1.b0da7ep-10f, 0x1.ccc528p-10f, 0x1.ea7cbcp-10f, 0x1.050f7cp-9f,  0x1.15e5bep-9f,  0x1.27d1fep-9f,
    0x1.3ae628p-9f,  0x1.4f3552p-9f,  0x1.64d3cep-9f,  0x1.7bd73cp-9f,  0x1.9456ap-9f,   0x1.ae6a7cp-9f,
    0x1.ca2ce8p-9f,  0x1.e7b9a6p-9f,  0x1.039724p-8f,  0x1.14552p-8f,   0x1.26278ap-8f,  0x1.392032p-8f,
    0x1.4d5216p-8f,  0x1.62d168p-8f,  0x1.79b3a8p-8f,  0x1.920fbap-8f,  0x1.abfep-8f,    0x1.c79866p-8f,
    0x1.e4fa8ap-8f,  0x1.0220eap-7f,  0x1.12c6c4p-7f,  0x1.247f7cp-7f,  0x1.375cccp-7f,  0x1.4b7192p-7f,
    0x1.60d1e6p-7f,  0x1.779328p-7f,  0x1.8fcc1ep-7f,  0x1.a995p-7f,    0x1.c5079cp-7f,  0x1.e23f64p-7f,
    0x1.00acccp-6f,  0x1.113aa6p-6f,  0x1.22d9d2p-6f,  0x1.359beep-6f,  0x1.4993c2p-6f,  0x1.5ed546p-6f,
    0x1.7575bap-6f,  0x1.8d8bc4p-6f,  0x1.a72f7cp-6f,  0x1.c27a86p-6f,  0x1.df882ep-6f,  0x1.fe7588p-6f,
    0x1.0fb0c2p-5f,  0x1.213686p-5f,  0x1.33dd9ap-5f,  0x1.47b8a4p-5f,  0x1.5cdb82p-5f,  0x1.735b58p-5f,
    0x1.8b4eaap-5f,  0x1.a4cd6ap-5f,  0x1.bff11cp-5f,  0x1.dcd4e4p-5f,  0x1.fb95a8p-5f,  0x1.0e2916p-4f,
    0x1.1f9598p-4f,  0x1.3221c8p-4f,  0x1.45e032p-4f,  0x1.5ae498p-4f,  0x1.7144p-4f,    0x1.8914cap-4f,
    0x1.a26ecap-4f,  0x1.bd6b5ap-4f,  0x1.da257cp-4f,  0x1.f8b9ecp-4f,  0x1.0ca3ap-3f,   0x1.1df704p-3f,
    0x1.306876p-3f,  0x1.440a6ap-3f,  0x1.58f082p-3f,  0x1.6f2faap-3f,  0x1.86de1ep-3f,  0x1.a01392p-3f,
    0x1.bae93cp-3f,  0x1.d779f4p-3f,  0x1.f5e24ep-3f,  0x1.0b205ap-2f,  0x1.1c5ac4p-2f,  0x1.2eb1ap-2f,
    0x1.423746p-2f,  0x1.56ff3ep-2f,  0x1.6d1e54p-2f,  0x1.84aaa4p-2f,  0x1.9dbbc2p-2f,  0x1.b86abcp-2f,
    0x1.d4d246p-2f,  0x1.f30ecap-2f,  0x1.099f42p-1f,  0x1.1ac0d6p-1f,  0x1.2cfd42p-1f,  0x1.4066c4p-1f,
    0x1.5510c8p-1f,  0x1.6b0ff8p-1f,  0x1.827a58p-1f,  0x1.9b675p-1f,   0x1.b5efd4p-1f,  0x1.d22e6cp-1f,
    0x1.f03f58p-1f,  0x1.082058p0f,   0x1.192938p0f,   0x1.2b4b5ap0f,   0x1.3e98ep0f,    0x1.53251ap0f,
    0x1.690494p0f,   0x1.804d32p0f,   0x1.99163cp0f,   0x1.b3787ep0f,   0x1.cf8e5ep0f,   0x1.ed73f4p0f,
    0x1.06a394p1f,   0x1.1793e6p1f,   0x1.299be2p1f,   0x1.3ccd96p1f,   0x1.513c3p1f,    0x1.66fc22p1f,
    0x1.7e232ep1f,   0x1.96c87ep1f,   0x1.b104b8p1f,   0x1.ccf21ap1f,   0x1.eaac96p1f,   0x1.0528f4p2f,
    0x1.1600dcp2f,   0x1.27eedap2f,   0x1.3b04ep2f,    0x1.4f5606p2f,   0x1.64f69ep2f,   0x1.7bfc4ap2f,
    0x1.947e12p2f,   0x1.ae947ap2f,   0x1.ca599ap2f,   0x1.e7e93ap2f,   0x1.03b076p3f,   0x1.147016p3f,
    0x1.26443cp3f,   0x1.393ebep3f,   0x1.4d729ap3f,   0x1.62f404p3f,   0x1.79d88p3f,    0x1.9236f4p3f,
    0x1.ac27cp3f,    0x1.c7c4d8p3f,   0x1.e529dap3f,   0x1.023a18p4f,   0x1.12e192p4f,   0x1.249c04p4f,
    0x1.377b2cp4f,   0x1.4b91e8p4f,   0x1.60f452p4f,   0x1.77b7ccp4f,   0x1.8ff31ep4f,   0x1.a9be86p4f,
    0x1.c533cep4f,   0x1.e26e7p4f,    0x1.00c5d6p5f,   0x1.11554ep5f,   0x1.22f632p5f,   0x1.35ba24p5f,
    0x1.49b3eap5f,   0x1.5ef78p5f,    0x1.759a2ap5f,   0x1.8db28ep5f,   0x1.a758c4p5f,   0x1.c2a678p5f,
    0x1.dfb6f8p5f,   0x1.fea756p5f,   0x1.0fcb44p6f,   0x1.2152bep6f,   0x1.33fba2p6f,   0x1.47d89cp6f,
    0x1.5cfd8ap6f,   0x1.737f94p6f,   0x1.8b753ap6f,   0x1.a4f678p6f,   0x1.c01cdp6f,    0x1.dd0368p6f,
    0x1.fbc72cp6f,   0x1.0e4372p7f,   0x1.1fb1a6p7f,   0x1.323fa6p7f,   0x1.45fffcp7f,   0x1.5b067p7f,
    0x1.716806p7f,   0x1.893b22p7f,   0x1.a2979cp7f,   0x1.bd96cep7f,   0x1.da53bep7f,   0x1.f8eb28p7f,
    0x1.0cbdd4p8f,   0x1.1e12e8p8f,   0x1.308628p8f,   0x1.442a06p8f,   0x1.59122ap8f,   0x1.6f537cp8f,
    0x1.87044p8f,    0x1.a03c2ap8f,   0x1.bb1472p8f,   0x1.d7a7f4p8f,   0x1.f61344p8f,   0x1.0b3a6ap9f,
    0x1.1c7682p9f,   0x1.2ecf28p9f,   0x1.4256b6p9f,   0x1.5720b6p9f,   0x1.6d41f2p9f,   0x1.84d09p9f,
    0x1.9de41ep9f,   0x1.b895b4p9f,   0x1.d50002p9f,   0x1.f33f7ap9f,   0x1.09b92cp10f,  0x1.1adc6cp10f,
    0x1.2d1aap10f,   0x1.408606p10f,  0x1.55320ep10f,  0x1.6b3364p10f,  0x1.82a00cp10f,  0x1.9b8f74p10f,
    0x1.b61a8ep10f,  0x1.d25be6p10f,  0x1.f06fc2p10f,  0x1.083a1cp11f,  0x1.1944a6p11f,  0x1.2b688cp11f,
    0x1.3eb7f4p11f,  0x1.53463p11f,
};

// exp((e - 64) / 8) for e = 1...127: every second one of log9's.
inline constexpr std::array<float, 127> kLogByteValues = [] {
  std::array<float, 127> values{};
  for (size_t e = 1; e <= values.size(); ++e)
    values[e - 1] = kLog9Values[2 * e - 1];
  return values;
}();

// A scalar codec as numbers: what the codec (float_codec.cpp) and the CUDA kernels make codes and values with
// (FORMAT.md, "Scalars").
struct ScalarTable {
  uint32_t bits;     // of a code, its sign included
  uint32_t last;     // bounds there are
  uint32_t factor;   // 2^9 times the numbers in an octave
  float value[256];  // of a number; 0 of number 0
  float bound[256];  // where numbers 2 and up begin; then infinity
};

constexpr ScalarTable scalarTable(uint32_t bits, uint32_t factor, std::span<const float> values,
                                  std::span<const float> bounds) {
  ScalarTable table{};
  table.bits = bits;
  table.factor = factor;
  table.last = static_cast<uint32_t>(bounds.size());
  for (uint32_t i = 0; i < 256; ++i) {
    table.value[i] = i > 0 && i <= values.size() ? values[i - 1] : 0;
    table.bound[i] = i < bounds.size() ? bounds[i] : std::numeric_limits<float>::infinity();
  }
  return table;
}

inline constexpr ScalarTable kLogByteTable = scalarTable(8, 2839, kLogByteValues, kLogByteBounds);  // 8·ln 2
inline constexpr ScalarTable kLog9Table = scalarTable(9, 5678, kLog9Values, kLog9Bounds);           // 16·ln 2

// The number of a finite magnitude that is not 0: 1 and the bounds at or below it.
//
// A float's bits are its logarithm to base 2, up to 0.087 too small, in units of 2^-23. So the difference of two bits,
// in numbers, is off by less than 1, and the bounds below are as many as its whole part, or one or two more.
LOWCOMM_HOST_DEVICE inline uint32_t scalarNumber(const ScalarTable& table, uint32_t magnitude) {
  const uint32_t first = floatBits(table.bound[0]);
  const uint32_t above = magnitude > first ? magnitude - first : 0;
  uint32_t below = static_cast<uint32_t>(uint64_t{above} * table.factor >> 32);
  if (below > table.last) below = table.last;
  const float x = floatOf(magnitude);
  return 1 + below + (table.bound[below] <= x ? 1 : 0) + (table.bound[below + 1] <= x ? 1 : 0);
}

// The sign above the number, 0 for a zero; a sign and 0 for no number.
LOWCOMM_HOST_DEVICE inline uint32_t scalarCode(const ScalarTable& table, float x) {
  const uint32_t magnitude = floatBits(x) & 0x7fffffffu, sign = 1u << (table.bits - 1);
  if (magnitude >= 0x7f800000u) return sign;
  if (magnitude == 0) return 0;
  return scalarNumber(table, magnitude) | (floatBits(x) >> 31 ? sign : 0);
}

LOWCOMM_HOST_DEVICE inline float scalarValue(const ScalarTable& table, uint32_t code) {
  const uint32_t sign = 1u << (table.bits - 1);
  if (code == sign) return floatOf(0x7fc00000u);
  const float value = table.value[code & (sign - 1)];
  return code & sign ? -value : value;
}

}  // namespace lowcomm
